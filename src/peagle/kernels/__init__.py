"""Fast paths in other languages, each beside a plain torch one that it must agree with."""
