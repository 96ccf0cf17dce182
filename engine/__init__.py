"""Decoding and model execution in one process: no network, no Ray."""
