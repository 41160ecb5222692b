"""The CustomResourceDefinition, made from the settings: a developer's tool beside the chart.
`charts/crd/generate` writes the chart's template.
"""

from crd.definition import crd_definition

__all__ = ["crd_definition"]
