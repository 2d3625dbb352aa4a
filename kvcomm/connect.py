"""``connect``: composition root of an agent's process; the only place where a client meets its tiers.

Which cluster?  The first of these that is given:

1. ``address=`` (``tcp://host:port`` of any node) or ``instance=`` (a cluster on this host, by name);
2. ``KVCOMM_ADDRESS`` or ``KVCOMM_INSTANCE`` in the environment;
3. the instance ``default``, if ``kvcomm up`` runs it on this host;
4. an embedded cluster: real processes of our own, gone when this process is.

The credential is ``token=``, else ``KVCOMM_TOKEN``, else made from the secret of a local instance (whoever can read its
directory is its owner).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcomm.aio import AsyncClient
from kvcomm.block import Incarnation
from kvcomm.blockplane import BlockPlane
from kvcomm.client import Client
from kvcomm.config import Config
from kvcomm.errors import Unavailable
from kvcomm.namespace import TenantDigest
from kvcomm.operations import Operations
from kvcomm.rpc import AsyncPeers, Identity, Peers
from kvcomm.settings import load_config
from kvcomm.stateplane import StatePlane
from kvcomm.wire.messages import RingGet, RingMap, RingNode

if TYPE_CHECKING:
    from kvcomm.embedded import Embedded

DEFAULT_INSTANCE = "default"
DEFAULT_TENANT = "default"
START_DEADLINE_S = 60.0
