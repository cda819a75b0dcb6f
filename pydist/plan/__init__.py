"""Predicts time and memory of a training step on any mesh, before it runs.

`trace_network` follows a network on shapes alone, `estimate_step` estimates its step on a mesh, and
`plan_meshes` compares all meshes of a number of ranks. `pydist plan` does so for a configuration.
`best_mesh` chooses one for `pydist.init`.
"""

from pydist.hardware import Hardware, Interconnect, load_hardware
from pydist.plan.choosing import best_mesh
from pydist.plan.estimate import Estimate, InStages, StepModel, Training
from pydist.plan.in_stages import estimate_in_stages
from pydist.plan.on_mesh import estimate_step
from pydist.plan.table import legal_meshes, plan_meshes
from pydist.plan.trace import Trace, trace_network

__all__ = [
    "Estimate",
    "Hardware",
    "InStages",
    "Interconnect",
    "StepModel",
    "Trace",
    "Training",
    "best_mesh",
    "estimate_in_stages",
    "estimate_step",
    "legal_meshes",
    "load_hardware",
    "plan_meshes",
    "trace_network",
]
