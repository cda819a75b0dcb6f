"""Start of the simulated device in every Python process that finds this folder on its path."""

import simulated_device

simulated_device.prepare()
