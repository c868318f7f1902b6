"""`python -m fastweight info | check | bench`: the library's tool, which the wheel carries."""

import os
import pathlib
import sys


def main() -> None:
    package = sys.modules["fastweight"]
    for folder in package.__path__:
        tool = pathlib.Path(folder) / "bin" / "fastweight"
        if tool.exists():
            os.execv(tool, ["fastweight", *sys.argv[1:]])
    sys.exit("fastweight: this build has no tool: it is made where nlohmann_json is found")


if __name__ == "__main__":
    main()
