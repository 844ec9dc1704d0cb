"""The lab: a booted Debian box with a real Docker Engine, and a small internet around it.

lab = Lab.up()
lab.box.run(["docker", "version"])
lab.internet.packets(lab.internet.addresses["forbidden"])
lab.close()
"""

from .box import Box
from .execute import CommandError, LabError
from .internet import Internet, Query
from .lab import Lab

__all__ = ["Box", "CommandError", "Internet", "Lab", "LabError", "Query"]
