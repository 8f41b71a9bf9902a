"""The theory held against a network: every term of the bounds on held-out data. See docs/theory.md."""

from protoseam.lab.audit.head import AuditedHead, audited_head, full_factors
from protoseam.lab.audit.seam import FULL, QUICK, Audit, AuditSettings, audit_seam, collapse_if_defined
from protoseam.lab.audit.terms import (
    CONFIDENCE,
    Bound,
    ClassMoments,
    SeamClasses,
    Smoothing,
    Spectrum,
    Totals,
    TrainingSide,
    covariance_spectrum,
)

__all__ = [
    "CONFIDENCE", "FULL", "QUICK", "Audit", "AuditSettings", "AuditedHead", "Bound", "ClassMoments", "SeamClasses",
    "Smoothing", "Spectrum", "Totals", "TrainingSide", "audit_seam", "audited_head", "collapse_if_defined",
    "covariance_spectrum", "full_factors",
]  # fmt: skip
