"""Forms of gradient reduction: how the ranks average the gradients of a bucket."""
