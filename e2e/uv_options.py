"""Prints the options that make uv use what pip is configured for, one on a line.

uv reads neither pip's configuration files nor its environment variables, so a machine with a
mirror, a folder of wheels or a certificate of its own would not be served.
"""

import ast
import re
import subprocess
import sys

OPTION_OF = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}


def uv_options(pip_configuration: str) -> list[str]:
    """Options from what `pip config list` prints; a value may hold several words."""
    options: list[str] = []
    certificates: list[str] = []  # uv takes one; as in pip, the last one given holds
    for line in pip_configuration.splitlines():
        match = re.fullmatch(r"(?:global|install|:env:)\.([\w-]+)=('.*')", line.strip())
        if match and match[1] in OPTION_OF:
            for value in str(ast.literal_eval(match[2])).split():
                options += [OPTION_OF[match[1]], value]
        elif match and match[1] == "cert":
            certificates = ["--cert", str(ast.literal_eval(match[2]))]
        elif match and match[1] == "no-index":
            options.append("--no-index")
    # pip takes the best version of all indexes; uv by default looks no further than the first
    # index that has the package.
    return [*options, *certificates, "--index-strategy", "unsafe-best-match", "--system-certs"]


def main() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    sys.stdout.write("\n".join(uv_options(listing.stdout)) + "\n")


if __name__ == "__main__":
    main()
