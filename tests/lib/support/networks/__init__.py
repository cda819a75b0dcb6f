"""Networks that tests train: small ones, and those that others wrote (`zoo`)."""
