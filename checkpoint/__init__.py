import configs.cpu  # noqa: F401  sets how threads wait, before torch is loaded
