"""Interceptors: done around the calls of a communicator, before its backend, until removed.

The first in this order is the outermost, whichever was added first:

    REFUSE    a forked child's call raises, before it waits for a lock that its parent's thread held
    JOIN      a call waits for those that were started before it
    COMPARE   the first calls are compared among the ranks; what is refused is not recorded
    COUNT     a viewer sees the call, while it looks
    TRACE     the call is a span of the launch's trace
"""
