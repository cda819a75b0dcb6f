"""The interface of all transports: their operations, and the handles of asynchronous ones."""
