"""The CustomResourceDefinition, made from the settings: `python -m pipelinerl_operator.crd` writes
the chart's template.
"""

from pipelinerl_operator.crd.definition import crd_definition

__all__ = ["crd_definition"]
