"""Defines the interface of all transports: operations, and handles of asynchronous ones."""
