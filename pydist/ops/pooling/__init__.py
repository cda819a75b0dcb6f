"""Average, maximum and adaptive pooling, and maximum unpooling."""
