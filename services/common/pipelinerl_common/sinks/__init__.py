"""Sinks for people who are used to Weights & Biases or TensorBoard: a row of numbers per optimizer
step.

They live in a process of their own beside rank 0 of the trainer, so that whatever their libraries
do (hang, crash, wait at exit for a network that is away) happens there.

```
metrics stream -> rows -> queue of one sink -> its thread -> Weights & Biases | TensorBoard
                               full: the row is dropped and counted
```
"""
