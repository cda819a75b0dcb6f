"""The mean of parameters' gradients over all ranks, whole or of each rank's part."""
