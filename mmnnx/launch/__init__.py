"""The command ``mmnnx launch``: prints what starts the processes of a run. It starts nothing and needs no
devices.

What comes in: a command, and where it is to run.
What goes out: shell lines, a job script for Slurm, a manifest for Kubernetes, or a line for gcloud.
What always holds: every argument of the command arrives as it was given; the processes find each other by
what JAX or `mm.initialize` reads; options of `mmnnx train` that a job cannot carry out are refused before it
waits in a queue.
Read first: `cli.py`, then one of `hosts.py`, `slurm.py`, `gke.py` and `tpu_pod.py`.
"""
