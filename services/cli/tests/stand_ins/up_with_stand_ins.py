"""The real `pipelinerl` command, but the services and the model's preparation are those of
stand_in.py.
"""

import sys
from typing import cast

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.up import run
from pipelinerl_control import plan

if __name__ == "__main__":
    modules = cast(dict[plan.Role, str], plan.MODULES)
    modules.update(dict.fromkeys(plan.Role, "stand_in"))
    run.PREPARE_MODULE = "stand_in"
    plan.EVALUATION_MARGIN_S = 3.0
    sys.exit(main())
