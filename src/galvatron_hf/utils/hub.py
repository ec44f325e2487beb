# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Finds out soon that there is no way to the Hub."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit
from urllib.request import getproxies


TRIES, SECONDS_BETWEEN = 3, 1.0  # a name server may be too busy once


def hub_is_out_of_reach() -> bool:
    """Returns whether the name of the Hub has no address here, as without a network: huggingface_hub would try for
    half a minute. On a slow network it has one, and a proxy looks names up itself.
    """
    from huggingface_hub.constants import ENDPOINT

    if getproxies():
        return False
    for attempt in range(TRIES):
        try:
            socket.getaddrinfo(urlsplit(ENDPOINT).hostname, None)
            return False
        except OSError:
            if attempt + 1 < TRIES:
                time.sleep(SECONDS_BETWEEN)
    return True
