"""Elastic islands: jobs of their own, which may die and return while the others train on."""

from .islands import ElasticIslands
from .quorum import Membership, MembershipError

__all__ = ["ElasticIslands", "Membership", "MembershipError"]
