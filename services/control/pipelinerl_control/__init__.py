"""What `pipelinerl up` and the operator share to control a job.

```
 plan         which processes a job needs, and their command lines
 coordinator  the weight-transfer group: observer -> membership (pure) -> transfer; service in front
 scaling      how many actors there are: readings -> balance -> scaling (pure)
 metrics      what both of these export
```
"""
