"""Supervision of workers: starts, health, losses, restarts.

``supervisor`` has every transition of a worker. It asks for ``actions``, which ``fleet`` carries
out. A loss is reported by an exit, a message, a time-out or ``health``. Then ``blame`` finds the
worker of the failure domain that failed first, ``kill_ladder`` ends the processes of the domain,
and ``recovery`` decides whether it is restarted, which is charged to its budget:

=============  =====================  ==============================  ===================  ========
``LossKind``   The worker ...         Blamed                          Its process gets     Restart
=============  =====================  ==============================  ===================  ========
EXIT           exited, or reported    itself, or the peer that it     time, then SIGKILL   charged,
               ``Failed``             reports as lost                                      or none
HUNG, SILENT   makes no step, or      itself if it is alone, or the   stack dump, SIGKILL  charged
               sends nothing          ``sole`` rank that the others
                                      wait for; else no rank
NOT_ACCEPTED,  ignores a request, an  itself                          stack dump, SIGKILL  charged
NOT_RELEASED,  abort, or is late to
START_TIMEOUT  start
PROTOCOL       sent what it may not   itself                          SIGKILL              charged
DISCONNECTED   cannot be reached      itself, unless an exit in its   SIGKILL              charged
                                      group explains it in time
SIBLING        belongs to a group     no rank; the other one is       SIGKILL              -
               that lost a rank
RESTART        is replaced on         no rank                         ``Shutdown``, then   free
               request                                                SIGKILL
=============  =====================  ==============================  ===================  ========

If another rank of the group has exited by itself before, that one is blamed instead. A blamed
worker's requests are suspects (``culprit``); losses of the last two kinds do not count against
requests at all. A worker that has lost a peer gets SIGKILL at once, since it may wait for that peer
for ever. There is no restart after an EXIT with which the same configuration would fail again
(``Loss.final``; ``recovery`` has the exceptions). The loss of a remote worker's machine is free.
"""
