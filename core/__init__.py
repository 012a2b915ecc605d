"""The vocabulary of Trireme: values every other folder speaks in.  Standard library only."""
