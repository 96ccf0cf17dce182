"""The product around the core: the command line, and the Ray Serve applications."""
