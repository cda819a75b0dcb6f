"""Networks that tests train: small ones, and third-party ones (`zoo`)."""
