"""The two machines of a handoff, and what a shell around them needs.

A connection, time running downwards::

    decoder                                    producer
    connect()        HELLO ->
                                   <- HELLO_ACK
                     PROOF ->
    Ready                             <- PROOF  Ready
    start()          PREFILL ->                 Requested
                         <- PROGRESS, any time  progress(), tick()
    Began                             <- BEGIN  begin()
    frame_header()                  <- frame n  next_slot(), frame()
    frame_digest()   CREDIT ->                  Credited
    Sealed                             <- SEAL  seal()
    commit()         COMMITTED ->               Committed
                     (and so on with the next PREFILL)

A connection that is lost before COMMITTED::

    machine.eof(), on both sides: reception and sending are their shells' now
    connect() and so on
    resume(reception)   RESUME ->              Interrupted
                           <- RESUMED          resume(sending), or abort()
                    <- (BEGIN) frame n ...     as before
    acknowledge(seal)   COMMITTED ->           Late: for a handoff that was sealed before

Either side may end a handoff with ``abort``; the other gets ``PeerAborted`` and answers
with ``release``. See ``states`` for the tables and ``README.md`` for the bytes.
"""

from protocol.deadlines import Timing
from protocol.decoder_machine import DecoderHandoff
from protocol.events import (
    Began,
    Committed,
    Credited,
    Event,
    Interrupted,
    Late,
    PeerAborted,
    Progressed,
    Ready,
    Released,
    Requested,
    Sealed,
)
from protocol.outstanding import Outstanding
from protocol.producer_machine import ProducerHandoff
from protocol.reception import Reception
from protocol.sending import Sending
from protocol.states import State

__all__ = [
    "Began",
    "Committed",
    "Credited",
    "DecoderHandoff",
    "Event",
    "Interrupted",
    "Late",
    "Outstanding",
    "PeerAborted",
    "ProducerHandoff",
    "Progressed",
    "Ready",
    "Reception",
    "Released",
    "Requested",
    "Sealed",
    "Sending",
    "State",
    "Timing",
]
