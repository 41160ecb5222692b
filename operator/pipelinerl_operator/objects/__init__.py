"""What a job needs in Kubernetes, as plain objects: pure constructors without API calls.

```
job = JobResource.parse(raw)             # SettingsError: the spec is invalid
wanted = desired_objects(job, context)   # objects to apply, and pods to create:
wanted.pods[0].manifest(attempt=0, excluded_nodes=())
```
"""

from pipelinerl_operator.objects.children import Desired, desired_objects, job_secret
from pipelinerl_operator.objects.context import Capabilities, OperatorContext
from pipelinerl_operator.objects.job_resource import JobResource
from pipelinerl_operator.objects.pods import PodSpec

__all__ = [
    "Capabilities",
    "Desired",
    "JobResource",
    "OperatorContext",
    "PodSpec",
    "desired_objects",
    "job_secret",
]
