"""Model runner: Hugging Face modules, our forward."""
