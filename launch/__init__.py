"""One script a job: flags in, one call into the library, an exit status out."""
