"""Rollouts by jaxserve in trainers of other projects."""
