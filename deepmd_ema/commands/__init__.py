"""Commands that use a run as a whole: check, init, report, posthoc, freeze, show and others."""
