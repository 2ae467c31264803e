"""Other frameworks' own parts over chunkcache: each framework has a folder, and an extra of its name."""
