"""Sources of data: each loads a training and a test set, or describes the files that hold them."""
