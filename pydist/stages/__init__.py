"""Divides a network's calls into stages over ranks, and sends micro-batches through them."""

from pydist.stages.division import pipeline
from pydist.stages.pipelines import Pipeline
from pydist.stages.plan import StagePlan
from pydist.stages.ranks import Stages, init_stages

__all__ = ["Pipeline", "StagePlan", "Stages", "init_stages", "pipeline"]
