"""Pipeline parallelism: consecutive layers of a model are a stage. Each stage is a process, or several that share its layers."""
