"""The maths as modules: lifting, the prototypes, the covariance estimators and the guards."""
