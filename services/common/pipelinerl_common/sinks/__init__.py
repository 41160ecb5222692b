"""Sinks that write to Weights & Biases or TensorBoard: one row of metrics per optimizer step.

They run in a separate process beside rank 0 of the trainer, so that whatever their libraries do
(hang, crash, wait at exit for an unreachable network) happens there.

```
metrics stream -> rows -> queue of one sink -> its thread -> Weights & Biases | TensorBoard
                               full: the row is dropped and counted
```
"""
