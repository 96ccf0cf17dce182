"""The decoding loop across processes: targets and drafts as Ray actors, joined by gRPC streams. Builds on `engine`."""
