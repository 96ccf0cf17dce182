"""Generated from `proto/paceline/v1` by `make proto`; not edited by hand."""
