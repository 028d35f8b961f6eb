"""Processes of different speed, of which one is asked to stop."""

import os
import signal
import sys
import time

import mmnnx as mm
from mmnnx.train.signals import Stop

COORDINATOR, COUNT, NUMBER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mm.initialize(COORDINATOR, COUNT, NUMBER)
with Stop() as stop:
    for step in range(100_000):
        time.sleep(0.002 * (NUMBER + 1))
        if NUMBER == 1 and step == 50:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop(step):
            break
print(stop.signal.name, "after step", step)

with Stop() as stop:  # process 0 is through before process 1 is asked
    for step in range(10):
        time.sleep(0.1 * NUMBER)
        if NUMBER == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        if stop(step) and step < 9:
            break
    else:
        print("second run: to the end")
