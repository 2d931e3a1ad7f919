import configs.cpu  # noqa: F401  how threads wait: it must be known before torch is loaded
