"""The compiled grammars of one worker: what is ready, what is on its way, what never will be.

    scheduler ── state ──▶ GrammarShelf ── grammar ──▶ lanes: threads, each with a `Compiler`
    book ─── matcher ────▶      ▲─── compiled, or why not ───┘
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from core.clock import Clock
from core.errors import BadRequest, DeadlineExceeded, InternalError, Stage, TriremeError
from core.messages import Grammar
from engine.grammar.matching import Compiled, Compiler, Matcher
from engine.grammar.rejection import rejected
from engine.policy.grammars import PENDING, READY, GrammarState

SOURCE_BYTES = 64 << 10
COMPILED_BYTES = 16 << 20
SHELF_BYTES = 256 << 20
SHELF_ENTRIES = 1024
LANES = 2
WAIT_S = 60.0
IN_USE_S = 60.0
