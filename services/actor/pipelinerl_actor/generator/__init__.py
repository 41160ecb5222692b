"""The generator: an inference engine behind three HTTP endpoints, which takes new weights between
two tokens.

```
            HTTP (app.py)
   completions, score |        | init_process_group, request_weight_update
                      v        v
        serving.py (prompts,   updater.py (order of an update,
        limits, versions)      refusals, roll-back)
                      |        |
                      v        v
                  Engine (engine.py)
              VllmEngine  |  TransformersEngine
```
"""
