"""`kvwire bench`: calls against a bare gRPC echo, data paths against memcpy, each as ratios of one run."""
