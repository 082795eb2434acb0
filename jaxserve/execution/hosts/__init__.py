"""One engine over several hosts: followers replay the leader's calls of programs."""
