"""How many actors there are while a job runs: the same for `pipelinerl up` and for the operator.

```
/metrics of trainer and preprocessor -> Reading -> Counts -> Period -> Balance
                                                                          |
                             Choice of the last look, step -> look -> Choice, and why
```
Who keeps the processes remembers the choice, and then acts on it.
"""
