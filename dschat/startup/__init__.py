"""What a process sets before its other imports: Ctrl-C while modules load, OpenMP's waiting."""
