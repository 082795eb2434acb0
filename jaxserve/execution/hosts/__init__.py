"""One engine over several hosts: a leader's program calls, which followers run again."""
