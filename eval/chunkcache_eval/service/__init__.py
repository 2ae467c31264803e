"""The service under load: fused beside full prefills, over HTTP on this machine alone."""
