"""The generator: an inference engine behind an HTTP interface, which receives new weights between
two tokens.

```
            HTTP (app.py)
   completions, score |        | init_process_group, request_weight_update
                      v        v
   request_handler.py (prompts,   updater.py (order of an update,
   limits, versions)              refusals, roll-back)
                      |        |
                      v        v
            GeneratorEngine (engine.py)
              VllmEngine  |  TransformersEngine
```
"""
