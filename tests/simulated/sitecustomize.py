"""Every Python process that finds this folder on its path has the simulated device."""

import simulated_device

simulated_device.prepare()
