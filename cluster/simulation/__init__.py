"""A fleet of targets and drafts on a virtual clock: the cluster's own state machines, cadence, batch and windows."""
