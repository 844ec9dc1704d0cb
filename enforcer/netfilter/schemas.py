"""What the writer says about itself in every answer, so that whoever asks can tell whether it is understood.

The same numbers as ``policy.versions``, which the writer's root-owned copy does not have; a test compares
them.
"""

from __future__ import annotations

from enforcer.netfilter.model import PROTOCOL_VERSION

# Grows when rules or claims of an older writer would be misread by this one.
SKELETON = 2

SCHEMAS = {"protocol": PROTOCOL_VERSION, "skeleton": SKELETON}
